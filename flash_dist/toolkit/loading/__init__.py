"""Loading of compiled code: predicted from symbol tables, or tried in a child process."""
