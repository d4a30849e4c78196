"""One file per patch: the sites in the frameworks, each bound to a core. Found by listing this folder."""
