"""Where things live: device meshes and data-parallel topologies."""
