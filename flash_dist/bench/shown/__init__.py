"""What `bench` prints: progress, tables and sentences."""
