//! Local terminal of `berth exec`: raw mode and window size.

use std::io;

use rustix::termios::{self, OptionalActions, Termios};

/// Raw mode of the terminal on standard input; restored on drop.
pub(super) struct RawMode {
    before: Termios,
}

impl RawMode {
    /// Enters raw mode: every key is passed to the command.
    pub(super) fn enter() -> io::Result<Self> {
        let before = termios::tcgetattr(io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        termios::tcsetattr(io::stdin(), OptionalActions::Now, &raw)?;
        Ok(Self { before })
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // The terminal may be closed already.
        let _ = termios::tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// Window size as JSON of the resize channel; `None` without a terminal.
pub(super) fn size() -> Option<String> {
    let size = termios::tcgetwinsize(io::stdout()).or_else(|_| termios::tcgetwinsize(io::stdin())).ok()?;
    let is_real = size.ws_col > 0 && size.ws_row > 0;
    is_real.then(|| format!(r#"{{"Width":{},"Height":{}}}"#, size.ws_col, size.ws_row))
}
