//! The image manager against the scripted CRI with a paused clock (spec 03b §1-4).

mod fixture;
mod garbage_collection;
mod plugins;
mod pulls;
mod real;
mod records;
