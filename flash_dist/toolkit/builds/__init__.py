"""What a build of ours declares, holds and ships with."""
