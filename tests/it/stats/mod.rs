//! Statistics across rooms: pages over the scripted runtime, and over real control groups.

mod house;
mod pages;
mod real;
