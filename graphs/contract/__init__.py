"""What the packages agree on: a checkpoint's config, what a build holds, its files' formats."""
