"""Whether compiled code loads here: predicted from symbol tables, or tried in a child."""
