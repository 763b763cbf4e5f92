//! Pod sources and the mux with real directories, real inotify, and a real HTTP server.
//!
//! No test sleeps: it waits for the expected operation, and proves that something did *not* happen by the next
//! operation.

mod file;
mod fixture;
mod http;
