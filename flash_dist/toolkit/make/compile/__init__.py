"""From sources to libraries, each kernel judged."""
