"""What the transports of this backend share: copies on a stream, and peers that copy."""
