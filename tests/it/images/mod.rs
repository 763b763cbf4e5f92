//! The images room against the scripted CRI under paused time (spec 03b §1-4).

mod collect;
mod plugins;
mod pull;
mod real;
mod records;
mod room;
