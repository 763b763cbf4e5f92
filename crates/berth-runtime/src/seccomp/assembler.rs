//! Assembler for classic BPF programs that builds from the end to the beginning. Pure.
//!
//! Jumps only go forward, so the target exists before the jump. Identical instructions are shared; a target beyond the
//! eight bits of a conditional jump is reached through an unconditional jump.

use std::collections::HashMap;

/// One instruction, as `struct sock_filter`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Instruction {
    /// Opcode.
    pub code: u16,
    /// Number of instructions to skip where the test is true.
    pub jump_true: u8,
    /// Number of instructions to skip where the test is false.
    pub jump_false: u8,
    /// Operand.
    pub k: u32,
}

/// Loads 32 bits of `struct seccomp_data`.
pub const LOAD: u16 = 0x20;
/// Returns an action.
pub const RETURN: u16 = 0x06;
/// Bitwise AND with a mask.
pub const AND: u16 = 0x54;
/// Unconditional forward jump.
pub const JUMP: u16 = 0x05;
/// Jump if equal.
pub const EQUAL: u16 = 0x15;
/// Jump if greater.
pub const GREATER: u16 = 0x25;
/// Jump if greater or equal.
pub const AT_LEAST: u16 = 0x35;

/// Position of an instruction, counted from the end of the program.
pub type Position = usize;

/// A program under construction; its last instruction is first.
#[derive(Default, Debug)]
pub struct Assembler {
    reversed: Vec<Instruction>,
    known: HashMap<(u16, u32, Position, Position), Position>,
}

impl Assembler {
    /// Appends a return of an action, or reuses one in range.
    pub fn finish(&mut self, action: u32) -> Position {
        let far = |place: Position, len: usize| len.saturating_sub(place) > usize::from(u8::MAX);
        let key = (RETURN, action, 0, 0);
        match self.known.get(&key) {
            // A new return if the known one is too far: shorter than an unconditional jump for each of its users.
            Some(&place) if !far(place, self.reversed.len()) => place,
            _ => {
                let place = self.push(RETURN, action, 0, 0);
                self.known.insert(key, place);
                place
            }
        }
    }

    /// Appends a conditional jump to two targets.
    pub fn test(&mut self, code: u16, k: u32, if_true: Position, if_false: Position) -> Position {
        if if_true == if_false {
            return if_true;
        }
        let key = (code, k, if_true, if_false);
        if let Some(&place) = self.known.get(&key) {
            return place;
        }
        // An unconditional jump for one target moves the other one further away, hence the second check.
        let if_true_near = self.near(if_true, 2);
        let if_false_near = self.near(if_false, 1);
        let if_true_near = self.near(if_true_near, 1);
        let (t, f) = (self.distance(if_true_near), self.distance(if_false_near));
        let (t, f) = (u8::try_from(t).unwrap_or(u8::MAX), u8::try_from(f).unwrap_or(u8::MAX));
        let place = self.push(code, k, t, f);
        self.known.insert(key, place);
        place
    }

    /// Appends a load or AND that continues at `next`.
    pub fn then(&mut self, code: u16, k: u32, next: Position) -> Position {
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

    /// The finished program, with its entry at `start`.
    pub fn program(mut self, start: Position) -> Vec<Instruction> {
        if self.distance(start) != 0 {
            self.jump(start);
        }
        self.reversed.reverse();
        self.reversed
    }

    /// The target itself, or an unconditional jump to it if it is out of range with `more` instructions in between.
    fn near(&mut self, place: Position, more: usize) -> Position {
        if self.distance(place) + more <= usize::from(u8::MAX) { place } else { self.jump(place) }
    }

    fn jump(&mut self, to: Position) -> Position {
        let distance = u32::try_from(self.distance(to)).unwrap_or(u32::MAX);
        self.push(JUMP, distance, 0, 0)
    }

    /// Number of instructions that the next one would have to skip.
    fn distance(&self, place: Position) -> usize {
        self.reversed.len().saturating_sub(place + 1)
    }

    fn push(&mut self, code: u16, k: u32, jump_true: u8, jump_false: u8) -> Position {
        self.reversed.push(Instruction { code, jump_true, jump_false, k });
        self.reversed.len() - 1
    }
}
