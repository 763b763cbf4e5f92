//! The runtime manager against the scripted CRI: spec 03a §4, §7-11, §16; 03b §8; 02a §9.8.

mod creates;
mod fixture;
mod garbage;
mod hooks;
mod kills;
mod resizes;
mod starts;
mod state;
