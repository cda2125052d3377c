"""Where the node group comes from: what the site, the job and the scheduler say, and which of them counts."""
