"""What lives as long as a job at a site: its attempts, groups started ahead, retries, the end."""
