"""The functions of this package under other packages' names, for programs written for those."""
