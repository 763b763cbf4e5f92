//! Statistics pages over the scripted runtime, and over real cgroups.

mod fixture;
mod pages;
mod real;
