"""From csrc/ to two libraries, each kernel judged."""
