//! Small programs inside this one: what the built-in images run.
//!
//! Started by the name they are called by (`/bin/sleep` is a link to this program), before anything else of the program: no
//! async runtime, no configuration, little memory. They show probes, logs, restarts, limits and services without a network.
//! Behaviour: spec 09b §8.

/// Names the program answers to.
pub const NAMES: &[&str] = &[
    "pause", "sleep", "echo", "cat", "env", "exit", "true", "false", "httpd", "wget", "logger", "memhog", "cpuhog",
    "ls", "id", "sh", "sh-lite",
];
