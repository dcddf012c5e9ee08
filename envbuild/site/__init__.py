"""The site: where builds and jobs run, as site.toml says it, and the user's configuration of pip and uv."""
