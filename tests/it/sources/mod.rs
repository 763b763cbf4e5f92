//! The sources and the mux with real directories, real inotify and a real HTTP server.
//!
//! Nothing sleeps to wait: a test waits for the operation it expects, and shows that something
//! did *not* happen by the next thing that does.

mod file;
mod house;
mod http;
