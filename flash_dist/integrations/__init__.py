"""What plugs the functions of this package into other libraries, in two lines each."""
