//! The terminal of who runs a command: raw while the command has it, and its size.

use std::io;

use rustix::termios::{self, OptionalActions, Termios};

/// The terminal on standard input, raw until dropped.
pub(super) struct Raw {
    before: Termios,
}

impl Raw {
    /// Every key goes to the command from now on.
    pub(super) fn enter() -> io::Result<Self> {
        let before = termios::tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        termios::tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Self { before })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // Whoever closed it needs it no more.
        let _ = termios::tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// Its size as the protocol tells it; `None` where there is none.
pub(super) fn size() -> Option<String> {
    let size = termios::tcgetwinsize(io::stdout()).or_else(|_| termios::tcgetwinsize(io::stdin())).ok()?;
    let is_real = size.ws_col > 0 && size.ws_row > 0;
    is_real.then(|| format!(r#"{{"Width":{},"Height":{}}}"#, size.ws_col, size.ws_row))
}
