//! Container output: CRI log format, reader, rotation, links.
