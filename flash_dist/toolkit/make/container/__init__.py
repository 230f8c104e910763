"""The same build in a manylinux container."""
