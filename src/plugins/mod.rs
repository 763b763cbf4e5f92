//! Programs that register with this agent by a socket in `<root>/plugins_registry`.
//!
//! ```text
//!  inotify ─┐                     ┌─► task of a socket ─► GetInfo ─► handler of its type
//!  walk ────┴─► sockets there are ┤                       ◄─ NotifyRegistrationStatus
//!                                 └─► …
//! ```
//!
//! In: the directory. Out: calls of a [`PluginHandler`](berth_ports::PluginHandler), one after the other
//! for each socket. One task owns what is there, and one per socket what became of it: a plugin that hangs
//! holds up itself. inotify says that something happened, a walk what; every half minute it walks without being
//! told. What plugins say is bounded, what they are refused for is told them. Behaviour: spec 06c §2, 07 §12.1.

mod registrant;
mod socket;
mod walk;
mod watcher;

pub use watcher::{Handlers, Watcher, WatcherDeps};
