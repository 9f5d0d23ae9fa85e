"""The packages' contract: a checkpoint's config, a build's contents, the formats of its files."""
