"""One file per patch: the sites in the hosts, each bound to a core. Found by listing this folder."""
