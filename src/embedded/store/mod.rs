//! What is known of objects on disk: a directory or file per object, small files, no database.
//!
//! Whoever looks with `ls` and `cat` after a crash sees what the program saw. Behaviour: spec 09 §6, §7.

pub mod record;
