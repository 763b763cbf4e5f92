//! Text of a caught panic, for logs.

use std::any::Any;

/// Message of a caught panic, prefixed by `panic: `; `panic` if it has no text.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.map_or_else(|| "panic".to_owned(), |text| format!("panic: {text}"))
}
