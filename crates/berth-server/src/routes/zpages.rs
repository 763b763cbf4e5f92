//! Content negotiation and encodings of `/flagz` and `/statusz`. Pure.
//!
//! The text form is for people. Programs name kind, group, and version as parameters of the media type and get JSON,
//! YAML, or CBOR. Implements spec 04 §5.7.

use axum::{
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Map, Value, json};

use super::text::PLAIN;

/// Separators of name and value; one is chosen at random so that nobody parses the text.
pub const DELIMITERS: [&str; 4] = [":", ": ", "=", " "];

/// Encodings of the object form.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Encoding {
    /// `application/json`
    Json,
    /// `application/yaml`
    Yaml,
    /// `application/cbor`
    Cbor,
}

impl Encoding {
    const ALL: [Self; 3] = [Self::Json, Self::Yaml, Self::Cbor];

    fn media(self) -> &'static str {
        match self {
            Self::Json => "application/json",
            Self::Yaml => "application/yaml",
            Self::Cbor => "application/cbor",
        }
    }
}

/// Requested form.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Form {
    /// Text, for people.
    Text,
    /// Versioned object, for programs.
    Object {
        /// Serialization format of the object: JSON, YAML, or CBOR.
        encoding: Encoding,
        /// API version, `v1beta1` or `v1alpha1`.
        version: &'static str,
    },
}

/// First lines of the text form.
pub fn heading(page: &str) -> String {
    format!(
        "\nkubelet {page}\nWarning: This endpoint is not meant to be machine parseable, has no formatting compatibility \
         guarantees and is for debugging purposes only.\n"
    )
}

/// Negotiates the form of `kind` by the `Accept` header; `None` where no requested form is supported.
pub fn form(headers: &HeaderMap, kind: &str) -> Option<Form> {
    let accept: Vec<&str> = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok()).collect();
    let accept = accept.join(",");
    if accept.trim().is_empty() {
        return Some(Form::Text);
    }
    let mut entries: Vec<(f64, &str)> = accept.split(',').map(|entry| (weight(entry), entry)).collect();
    entries.retain(|(weight, _)| *weight > 0.0);
    entries.sort_by(|a, b| b.0.total_cmp(&a.0)); // stable: of equal weights the first one wins
    entries.into_iter().find_map(|(_, entry)| entry_form(entry, kind))
}

fn parameters(entry: &str) -> impl Iterator<Item = (&str, &str)> {
    entry.split(';').skip(1).filter_map(|pair| pair.split_once('=')).map(|(key, value)| (key.trim(), value.trim()))
}

fn weight(entry: &str) -> f64 {
    parameters(entry).find(|(key, _)| *key == "q").map_or(1.0, |(_, value)| value.parse().unwrap_or(1.0))
}

fn entry_form(entry: &str, kind: &str) -> Option<Form> {
    let media = entry.split(';').next().unwrap_or_default().trim();
    let of = |name: &str| parameters(entry).find(|(key, _)| *key == name).map_or("", |(_, value)| value);
    if matches!(media, "*/*" | "text/*" | "text/plain") {
        return Some(Form::Text);
    }
    let encoding = Encoding::ALL.into_iter().find(|encoding| encoding.media() == media)?;
    let version = ["v1beta1", "v1alpha1"].into_iter().find(|version| *version == of("v"))?;
    let is_ours = of("as") == kind && of("g") == "config.k8s.io";
    is_ours.then_some(Form::Object { encoding, version })
}

/// 406 response in the format of the Kubernetes API.
pub fn not_acceptable() -> Response {
    let message = "only the following media types are accepted: application/json, application/yaml, text/plain";
    let status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
        "reason": "NotAcceptable", "code": 406,
    });
    (StatusCode::NOT_ACCEPTABLE, [(header::CONTENT_TYPE, "application/json")], format!("{status}\n")).into_response()
}

/// Response in text form.
pub fn text(body: String) -> Response {
    ([(header::CONTENT_TYPE, PLAIN)], body).into_response()
}

/// Response with an object of `kind` with these fields.
pub fn object(kind: &str, version: &str, encoding: Encoding, fields: Map<String, Value>) -> Response {
    let mut object = Map::new();
    object.insert("kind".to_owned(), kind.into());
    object.insert("apiVersion".to_owned(), format!("config.k8s.io/{version}").into());
    object.insert("metadata".to_owned(), json!({"name": "kubelet"}));
    object.extend(fields);
    let object = Value::Object(object);
    let body = match encoding {
        Encoding::Json => format!("{object}\n").into_bytes(),
        // Falls back to JSON, which is valid YAML.
        Encoding::Yaml => serde_saphyr::to_string(&object).unwrap_or_else(|_| object.to_string()).into_bytes(),
        Encoding::Cbor => cbor(&object),
    };
    let media = format!("{};g=config.k8s.io;v={version};as={kind}", encoding.media());
    let mut response = ([(header::CONTENT_TYPE, media)], body).into_response();
    if version == "v1alpha1" {
        let page = kind.to_lowercase();
        let warning =
            format!("299 - \"This version of the {page} endpoint is deprecated. Please use a newer version.\"");
        if let Ok(warning) = HeaderValue::try_from(warning) {
            response.headers_mut().insert(header::WARNING, warning);
        }
    }
    response
}

/// CBOR as the Kubernetes API writes it: self-described, strings as byte strings, keys sorted.
fn cbor(value: &Value) -> Vec<u8> {
    let mut out = vec![0xd9, 0xd9, 0xf7];
    write_cbor(value, &mut out);
    out
}

fn write_cbor(value: &Value, out: &mut Vec<u8>) {
    const BYTES: u8 = 2;
    match value {
        Value::Null => out.push(0xf6),
        Value::Bool(value) => out.push(if *value { 0xf5 } else { 0xf4 }),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => cbor_head(0, number, out),
            (None, Some(negative)) => cbor_head(1, !negative.cast_unsigned(), out),
            (None, None) => {
                out.push(0xfb);
                out.extend(number.as_f64().unwrap_or_default().to_be_bytes());
            }
        },
        Value::String(text) => {
            cbor_head(BYTES, text.len() as u64, out);
            out.extend(text.as_bytes());
        }
        Value::Array(items) => {
            cbor_head(4, items.len() as u64, out);
            items.iter().for_each(|item| write_cbor(item, out));
        }
        Value::Object(fields) => {
            cbor_head(5, fields.len() as u64, out);
            let mut keys: Vec<&String> = fields.keys().collect();
            keys.sort_by(|a, b| a.len().cmp(&b.len()).then_with(|| a.cmp(b)));
            for key in keys {
                cbor_head(BYTES, key.len() as u64, out);
                out.extend(key.as_bytes());
                write_cbor(&fields[key], out);
            }
        }
    }
}

/// Writes a major type and its argument in the shortest form.
fn cbor_head(major: u8, argument: u64, out: &mut Vec<u8>) {
    let major = major << 5;
    let bytes = argument.to_be_bytes();
    match argument {
        0..24 => out.push(major | bytes[7]),
        24..=0xff => out.extend([major | 24, bytes[7]]),
        0x100..=0xffff => {
            out.push(major | 25);
            out.extend(&bytes[6..]);
        }
        0x1_0000..=0xffff_ffff => {
            out.push(major | 26);
            out.extend(&bytes[4..]);
        }
        _ => {
            out.push(major | 27);
            out.extend(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_name_kind_group_and_version() {
        let object = |encoding, version| Some(Form::Object { encoding, version });
        for (accept, expected) in [
            ("", Some(Form::Text)),
            ("*/*", Some(Form::Text)),
            ("text/plain;q=0.5", Some(Form::Text)),
            ("application/json", None),
            ("application/json;as=Flagz;v=v1beta1;g=config.k8s.io", object(Encoding::Json, "v1beta1")),
            ("application/yaml; as=Flagz; v=v1alpha1; g=config.k8s.io", object(Encoding::Yaml, "v1alpha1")),
            ("application/cbor;as=Flagz;v=v1beta1;g=config.k8s.io", object(Encoding::Cbor, "v1beta1")),
            ("application/json;as=Statusz;v=v1beta1;g=config.k8s.io", None),
            ("application/json;as=Flagz;v=v1;g=config.k8s.io", None),
            ("application/json, text/plain", Some(Form::Text)),
            (
                "text/plain;q=0.1, application/json;as=Flagz;v=v1beta1;g=config.k8s.io",
                object(Encoding::Json, "v1beta1"),
            ),
            ("text/plain;q=0", None),
            ("image/png", None),
        ] {
            let headers = HeaderMap::from_iter([(header::ACCEPT, accept.parse().expect("a value"))]);
            assert_eq!(form(&headers, "Flagz"), expected, "{accept}");
        }
    }

    #[test]
    fn cbor_is_written_as_the_api_writes_it() {
        let value = json!({"bb": [0, 23, 24, 300, 70000, 5_000_000_000_u64, -1, null, true, 0.5], "a": "x"});
        let expected: &[u8] = &[
            0xd9, 0xd9, 0xf7, 0xa2, 0x41, b'a', 0x41, b'x', 0x42, b'b', b'b', 0x8a, 0x00, 0x17, 0x18, 24, 0x19, 1, 44,
            0x1a, 0, 1, 0x11, 0x70, 0x1b, 0, 0, 0, 1, 0x2a, 5, 0xf2, 0, 0x20, 0xf6, 0xf5, 0xfb, 0x3f, 0xe0, 0, 0, 0, 0,
            0, 0,
        ];
        assert_eq!(cbor(&value), expected);
    }
}
