//! Statistics across rooms: pages over the scripted runtime, and over real control groups.

#[path = "../kit/mod.rs"]
mod kit;

mod house;
mod pages;
mod real;
