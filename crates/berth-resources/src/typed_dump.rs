//! Go's typed dump of checkpoint objects, the input of their checksums. Pure. Spec 06 §4.1.

use std::{collections::BTreeMap, fmt::Write};

use berth_types::{PodUid, hash::fnv1a_32};

/// A value with a dump; its own type is printed by the object or field that contains it.
pub trait TypedDump {
    /// Appends the dump of the value.
    fn dump(&self, text: &mut String);
}

/// A pointer that is an element of a slice, or a value of a map. Not for pointers that are fields of a struct.
pub struct Pointer<T>(pub T);

/// Checksum of an object: FNV-1a of `(type)` and its dump.
pub fn checksum(type_name: &str, object: &impl TypedDump) -> u32 {
    let mut text = format!("({type_name})");
    object.dump(&mut text);
    fnv1a_32(text.as_bytes())
}

/// Appends a struct of fields with name, type, and value: `{name:(type)value name:(type)value}`.
pub fn dump_struct(text: &mut String, fields: &[(&str, &str, &dyn TypedDump)]) {
    dump_joined(text, "{", fields, '}', |text, (name, type_name, value)| {
        let _infallible = write!(text, "{name}:({type_name})");
        value.dump(text);
    });
}

impl<T: TypedDump> TypedDump for Pointer<T> {
    fn dump(&self, text: &mut String) {
        text.push_str("<*>");
        self.0.dump(text);
    }
}

impl<T: TypedDump + ?Sized> TypedDump for &T {
    fn dump(&self, text: &mut String) {
        (**self).dump(text);
    }
}

/// A nil slice or map is `None`.
impl<T: TypedDump> TypedDump for Option<T> {
    fn dump(&self, text: &mut String) {
        match self {
            Some(value) => value.dump(text),
            None => text.push_str("<nil>"),
        }
    }
}

impl<T: TypedDump> TypedDump for Vec<T> {
    fn dump(&self, text: &mut String) {
        dump_joined(text, "[", self, ']', |text, element| element.dump(text));
    }
}

impl<K: TypedDump, V: TypedDump> TypedDump for BTreeMap<K, V> {
    fn dump(&self, text: &mut String) {
        dump_joined(text, "map[", self, ']', |text, (key, value)| {
            key.dump(text);
            text.push(':');
            value.dump(text);
        });
    }
}

impl TypedDump for String {
    fn dump(&self, text: &mut String) {
        text.push_str(self);
    }
}

impl TypedDump for PodUid {
    fn dump(&self, text: &mut String) {
        text.push_str(self.as_str());
    }
}

impl TypedDump for i64 {
    fn dump(&self, text: &mut String) {
        let _infallible = write!(text, "{self}");
    }
}

impl TypedDump for u64 {
    fn dump(&self, text: &mut String) {
        let _infallible = write!(text, "{self}");
    }
}

impl TypedDump for u32 {
    fn dump(&self, text: &mut String) {
        let _infallible = write!(text, "{self}");
    }
}

impl TypedDump for u8 {
    fn dump(&self, text: &mut String) {
        let _infallible = write!(text, "{self}");
    }
}

/// Appends elements, separated by spaces, between `open` and `close`.
fn dump_joined<T>(
    text: &mut String,
    open: &str,
    elements: impl IntoIterator<Item = T>,
    close: char,
    dump: impl Fn(&mut String, T),
) {
    text.push_str(open);
    for (index, element) in elements.into_iter().enumerate() {
        if index > 0 {
            text.push(' ');
        }
        dump(text, element);
    }
    text.push(close);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_printed_as_go_prints_them() {
        let numbers = BTreeMap::from([(10_i64, vec![1_u8, 255]), (-1, vec![]), (2, vec![0])]);
        let pointers = BTreeMap::from([(PodUid::from("p"), Pointer(&u64::MAX))]);
        let cases: [(&dyn TypedDump, &str); 8] = [
            (&String::from("a\"b c"), "a\"b c"),
            (&Vec::<u8>::new(), "[]"),
            (&None::<Vec<u8>>, "<nil>"),
            (&BTreeMap::<String, String>::new(), "map[]"),
            (&numbers, "map[-1:[] 2:[0] 10:[1 255]]"),
            (&BTreeMap::from([(String::from("k"), None::<Vec<String>>)]), "map[k:<nil>]"),
            (&pointers, "map[p:<*>18446744073709551615]"),
            (&BTreeMap::from([(40_u32, 1_u64), (5, 0)]), "map[5:0 40:1]"),
        ];
        for (value, expected) in cases {
            let mut text = String::new();
            value.dump(&mut text);
            assert_eq!(text, expected);
        }
    }

    #[test]
    fn fields_are_printed_with_their_types() {
        let mut text = String::new();
        dump_struct(&mut text, &[("Name", "string", &String::from("n")), ("Node", "int64", &-1_i64)]);
        assert_eq!(text, "{Name:(string)n Node:(int64)-1}");
        dump_struct(&mut text, &[]);
        assert!(text.ends_with("{}"));
    }
}
