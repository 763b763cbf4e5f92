//! Puts a classic BPF program together, from its end to its beginning. Pure.
//!
//! Jumps only go forward, so what is jumped to is made first. Equal instructions are made once; what is too far away
//! for the eight bits of a jump is reached over a long one.

use std::collections::HashMap;

/// One instruction, as `struct sock_filter`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Instruction {
    /// What.
    pub code: u16,
    /// How many to skip where the test is true.
    pub jump_true: u8,
    /// How many to skip where it is false.
    pub jump_false: u8,
    /// Its number.
    pub k: u32,
}

/// Loads 32 bits of the call's data.
pub const LOAD: u16 = 0x20;
/// Returns an action.
pub const RETURN: u16 = 0x06;
/// Combines with a mask.
pub const AND: u16 = 0x54;
/// Skips as many.
pub const JUMP: u16 = 0x05;
/// Whether equal.
pub const EQUAL: u16 = 0x15;
/// Whether greater.
pub const GREATER: u16 = 0x25;
/// Whether greater or equal.
pub const AT_LEAST: u16 = 0x35;

/// A place in a program, counted from its end.
pub type Place = usize;

/// A program in the making: its last instruction is first.
#[derive(Default, Debug)]
pub struct Assembly {
    reversed: Vec<Instruction>,
    known: HashMap<(u16, u32, Place, Place), Place>,
}

impl Assembly {
    /// Returns an action.
    pub fn finish(&mut self, action: u32) -> Place {
        let far = |place: Place, len: usize| len.saturating_sub(place) > usize::from(u8::MAX);
        let key = (RETURN, action, 0, 0);
        match self.known.get(&key) {
            // Made anew where it is too far away: that is shorter than a long jump for each of those who need it.
            Some(&place) if !far(place, self.reversed.len()) => place,
            _ => {
                let place = self.push(RETURN, action, 0, 0);
                self.known.insert(key, place);
                place
            }
        }
    }

    /// Tests, and goes on at either place.
    pub fn test(&mut self, code: u16, k: u32, if_true: Place, if_false: Place) -> Place {
        if if_true == if_false {
            return if_true;
        }
        let key = (code, k, if_true, if_false);
        if let Some(&place) = self.known.get(&key) {
            return place;
        }
        // A long jump to one moves the other further away, hence twice.
        let if_true_near = self.near(if_true, 2);
        let if_false_near = self.near(if_false, 1);
        let if_true_near = self.near(if_true_near, 1);
        let (t, f) = (self.distance(if_true_near), self.distance(if_false_near));
        let (t, f) = (u8::try_from(t).unwrap_or(u8::MAX), u8::try_from(f).unwrap_or(u8::MAX));
        let place = self.push(code, k, t, f);
        self.known.insert(key, place);
        place
    }

    /// Loads or combines, and goes on.
    pub fn then(&mut self, code: u16, k: u32, next: Place) -> Place {
        let key = (code, k, next, next);
        if let Some(&place) = self.known.get(&key) {
            return place;
        }
        if self.distance(next) != 0 {
            self.jump(next);
        }
        let place = self.push(code, k, 0, 0);
        self.known.insert(key, place);
        place
    }

    /// The program, beginning at a place.
    pub fn program(mut self, start: Place) -> Vec<Instruction> {
        if self.distance(start) != 0 {
            self.jump(start);
        }
        self.reversed.reverse();
        self.reversed
    }

    /// The place itself, or a long jump to it where it could not be reached with so many instructions in between.
    fn near(&mut self, place: Place, more: usize) -> Place {
        if self.distance(place) + more <= usize::from(u8::MAX) { place } else { self.jump(place) }
    }

    fn jump(&mut self, to: Place) -> Place {
        let distance = u32::try_from(self.distance(to)).unwrap_or(u32::MAX);
        self.push(JUMP, distance, 0, 0)
    }

    /// How many instructions the next one has to skip.
    fn distance(&self, place: Place) -> usize {
        self.reversed.len().saturating_sub(place + 1)
    }

    fn push(&mut self, code: u16, k: u32, jump_true: u8, jump_false: u8) -> Place {
        self.reversed.push(Instruction { code, jump_true, jump_false, k });
        self.reversed.len() - 1
    }
}
