//! Plugin registration: watches the sockets in `<root>/plugins_registry`.
//!
//! ```text
//!  inotify ─┐                     ┌─► task of a socket ─► GetInfo ─► handler of its type
//!  walk ────┴─► current sockets   ┤                       ◄─ NotifyRegistrationStatus
//!                                 └─► …
//! ```
//!
//! Input: the directory. Output: calls of a [`PluginHandler`](berth_ports::PluginHandler), sequential
//! per socket. One task owns the set of sockets, and one task per socket its registration: a plugin
//! that hangs blocks only itself. inotify triggers a walk of the directory; without events the walk
//! runs every 30 seconds. Sizes of plugin messages are limited, and plugins are notified of rejections.
//! Implements spec 06c §2, 07 §12.1.

mod directory_walk;
mod registrant;
mod registration_task;
mod watcher;

pub use watcher::{Handlers, Watcher, WatcherDeps};
