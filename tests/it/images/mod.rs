//! The image manager against the scripted CRI with a paused clock (spec 03b §1-4).

mod collect;
mod fixture;
mod plugins;
mod pull;
mod real;
mod records;
