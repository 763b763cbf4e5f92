//! What those say who panic.

use std::any::Any;

/// The text of a panic that was caught.
pub fn said(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    text.map_or_else(|| "panic".to_owned(), |text| format!("panic: {text}"))
}
