"""Tools that build, check and measure the wheels. Nothing here is installed."""
