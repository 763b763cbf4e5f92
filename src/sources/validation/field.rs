//! Field paths and field errors with the API server's texts. Pure.

use std::fmt;

use berth_config::text::excerpt;
use berth_types::fieldpath::quoted;

/// Path of a field, for example, `spec.containers[0].image`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Path(String);

impl Path {
    /// Path of a top-level field.
    pub fn root(name: &str) -> Self {
        Self(name.to_owned())
    }

    /// Path of a member of this field.
    #[must_use]
    pub fn child(&self, name: &str) -> Self {
        Self(format!("{}.{name}", self.0))
    }

    /// Path of an element of this list.
    #[must_use]
    pub fn index(&self, index: usize) -> Self {
        Self(format!("{}[{index}]", self.0))
    }

    /// Path of an entry of this map.
    #[must_use]
    pub fn key(&self, key: &str) -> Self {
        Self(format!("{}[{key}]", self.0))
    }
}

/// One field error; displays as the API server's text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FieldError(String);

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// All errors of a pod, in the order in which they were found.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct FieldErrors(Vec<FieldError>);

/// Maximum number of errors displayed per pod.
const SHOWN: usize = 100;

/// Displays as `[first second]`.
impl fmt::Display for FieldErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<&str> = self.0.iter().take(SHOWN).map(|error| error.0.as_str()).collect();
        let more = match self.0.len().saturating_sub(SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        write!(f, "[{}{more}]", texts.join(" "))
    }
}

/// A value in an error text: strings are quoted, numbers are not.
pub enum DisplayValue<'a> {
    /// Quoted string.
    Text(&'a str),
    /// Integer, displayed in decimal without quotes.
    Number(i64),
    /// `true` or `false`.
    Flag(bool),
    /// List of quoted strings.
    List(&'a [String]),
}

impl<'a> From<&'a str> for DisplayValue<'a> {
    fn from(text: &'a str) -> Self {
        Self::Text(text)
    }
}

impl<'a> From<&'a String> for DisplayValue<'a> {
    fn from(text: &'a String) -> Self {
        Self::Text(text)
    }
}

impl From<bool> for DisplayValue<'_> {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

impl<'a> From<&'a [String]> for DisplayValue<'a> {
    fn from(list: &'a [String]) -> Self {
        Self::List(list)
    }
}

impl From<i64> for DisplayValue<'_> {
    fn from(number: i64) -> Self {
        Self::Number(number)
    }
}

impl From<i32> for DisplayValue<'_> {
    fn from(number: i32) -> Self {
        Self::Number(number.into())
    }
}

impl fmt::Display for DisplayValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(&quoted(&excerpt(text))),
            Self::Number(number) => write!(f, "{number}"),
            Self::Flag(flag) => write!(f, "{flag}"),
            Self::List(list) => {
                let items: Vec<String> = list.iter().map(|item| quoted(item)).collect();
                f.write_str(&excerpt(&format!("[{}]", items.join(","))))
            }
        }
    }
}

impl FieldErrors {
    /// Whether there are no errors.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The error texts.
    pub fn texts(&self) -> Vec<String> {
        self.0.iter().map(ToString::to_string).collect()
    }

    fn add(&mut self, path: &Path, what: &str, detail: &str) {
        let detail = if detail.is_empty() { String::new() } else { format!(": {}", excerpt(detail)) };
        self.0.push(FieldError(format!("{}: {what}{detail}", excerpt(&path.0))));
    }

    /// Adds `Required value`: the field must be set.
    pub fn required(&mut self, path: &Path, detail: &str) {
        self.add(path, "Required value", detail);
    }

    /// Adds `Invalid value`.
    pub fn invalid<'a>(&mut self, path: &Path, value: impl Into<DisplayValue<'a>>, detail: &str) {
        self.add(path, &format!("Invalid value: {}", value.into()), detail);
    }

    /// Adds an `Invalid value` for each of these complaints.
    pub fn complaints(&mut self, path: &Path, value: &str, complaints: Vec<String>) {
        complaints.iter().for_each(|complaint| self.invalid(path, value, complaint));
    }

    /// Adds `Unsupported value`, with the supported ones.
    pub fn unsupported(&mut self, path: &Path, value: &str, supported: &[&str]) {
        let supported: Vec<String> = supported.iter().map(|one| quoted(one)).collect();
        self.add(
            path,
            &format!("Unsupported value: {}", quoted(&excerpt(value))),
            &format!("supported values: {}", supported.join(", ")),
        );
    }

    /// Adds `Duplicate value`.
    pub fn duplicate(&mut self, path: &Path, value: &str) {
        self.add(path, &format!("Duplicate value: {}", quoted(&excerpt(value))), "");
    }

    /// Adds `Not found`: the referenced object does not exist.
    pub fn not_found(&mut self, path: &Path, value: &str) {
        self.add(path, &format!("Not found: {}", quoted(&excerpt(value))), "");
    }

    /// Adds `Not found` with a detail that lists the existing objects.
    pub fn not_found_among(&mut self, path: &Path, value: &str, detail: &str) {
        self.add(path, &format!("Not found: {}", quoted(&excerpt(value))), detail);
    }

    /// Adds `Forbidden`: the field must not be set here.
    pub fn forbidden(&mut self, path: &Path, detail: &str) {
        self.add(path, "Forbidden", detail);
    }

    /// Adds `Too long`: the value exceeds the limit in bytes.
    pub fn too_long(&mut self, path: &Path, limit: usize) {
        self.add(path, "Too long", &format!("may not be more than {limit} bytes"));
    }

    /// Adds `Too many`: the list exceeds the limit of items.
    pub fn too_many(&mut self, path: &Path, found: usize, limit: usize) {
        self.add(path, &format!("Too many: {found}"), &format!("must have at most {limit} items"));
    }

    /// Checks that the value is supported; unset is `Required value`.
    pub fn one_of(&mut self, path: &Path, value: Option<&str>, supported: &[&str]) {
        match value.unwrap_or_default() {
            "" => self.required(path, ""),
            value if supported.contains(&value) => {}
            value => self.unsupported(path, value, supported),
        }
    }

    /// Checks that the value is supported; empty is `Unsupported value` like any other.
    pub fn supported(&mut self, path: &Path, value: &str, supported: &[&str]) {
        if !supported.contains(&value) {
            self.unsupported(path, value, supported);
        }
    }

    /// Checks that the number is not negative.
    pub fn not_negative(&mut self, path: &Path, value: Option<impl Into<i64>>) {
        if let Some(value) = value.map(Into::into).filter(|value| *value < 0) {
            self.invalid(path, value, "must be greater than or equal to 0");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_read_like_those_of_the_api_server() {
        let at = Path::root("spec").child("containers").index(0);
        let mut errors = FieldErrors::default();
        errors.required(&at.child("image"), "");
        errors.invalid(&at.child("name"), "A b", "must be nice");
        errors.invalid(&at.key("k"), 5_i64, "");
        errors.unsupported(&at, "x", &["A", "B"]);
        errors.duplicate(&at, "a\"b");
        errors.not_found(&at, "v");
        errors.not_found_among(&at, "v", "only w");
        errors.supported(&at, "A", &["A"]);
        errors.supported(&at, "", &["A"]);
        errors.forbidden(&at, "no");
        errors.too_long(&at, 253);
        errors.too_many(&at, 21, 20);
        errors.not_negative(&at, Some(-1));
        let path = "spec.containers[0]";
        assert_eq!(
            errors.texts(),
            [
                format!("{path}.image: Required value"),
                format!("{path}.name: Invalid value: \"A b\": must be nice"),
                format!("{path}[k]: Invalid value: 5"),
                format!("{path}: Unsupported value: \"x\": supported values: \"A\", \"B\""),
                format!("{path}: Duplicate value: \"a\\\"b\""),
                format!("{path}: Not found: \"v\""),
                format!("{path}: Not found: \"v\": only w"),
                format!("{path}: Unsupported value: \"\": supported values: \"A\""),
                format!("{path}: Forbidden: no"),
                format!("{path}: Too long: may not be more than 253 bytes"),
                format!("{path}: Too many: 21: must have at most 20 items"),
                format!("{path}: Invalid value: -1: must be greater than or equal to 0"),
            ]
        );
    }
}
