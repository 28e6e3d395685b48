"""The instances behind the proxy: what they are, who declares them, whether they live."""
