"""A backend of mooncake-hal for a chip that does not exist: the host plays its part."""
