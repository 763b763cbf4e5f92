//! Statistics pages over the scripted runtime, and over real cgroups.

mod house;
mod pages;
mod real;
