"""The site: the settings of builds and jobs in site.toml, and the user's configuration of pip and uv."""
