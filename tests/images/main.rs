//! The images room against the scripted CRI under paused time (spec 03b §1-4).

#[macro_use]
#[path = "../kit/mod.rs"]
mod kit;

mod collect;
mod plugins;
mod pull;
mod real;
mod records;
mod room;
