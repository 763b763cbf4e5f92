//! Query parameters of exec, attach, and port-forward, parsed as kubelet does (spec 04b §2). Pure.
//!
//! A flag is set only by exactly `1`. Of a repeated key the first value counts, and a form-encoded body precedes the
//! query. A pair that cannot be decoded is ignored.

use berth_config::text::quote;

/// Decoded pairs of a query or a form-encoded body, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueryForm(Vec<(String, String)>);

impl QueryForm {
    /// Parses `a=1&b=2`; `+` is a space.
    pub fn parse(text: &str) -> Self {
        let pairs = text.split('&').filter(|pair| !pair.is_empty() && !pair.contains(';'));
        let decoded = pairs.filter_map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            Some((decode(key)?, decode(value)?))
        });
        Self(decoded.collect())
    }

    /// Appends the pairs of another form.
    pub fn followed_by(mut self, other: &Self) -> Self {
        self.0.extend(other.0.iter().cloned());
        self
    }

    /// First value of a key.
    pub fn first(&self, key: &str) -> Option<&str> {
        self.all(key).next()
    }

    /// All values of a key, in order.
    pub fn all<'a>(&'a self, key: &str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(known, _)| known == key).map(|(_, value)| value.as_str())
    }

    fn set(&self, key: &str) -> bool {
        self.first(key) == Some("1")
    }
}

/// Decodes `%XX` and `+`; `None` for an invalid escape.
fn decode(text: &str) -> Option<String> {
    let mut bytes = text.bytes();
    let mut out = Vec::with_capacity(text.len());
    while let Some(byte) = bytes.next() {
        out.push(match byte {
            b'+' => b' ',
            b'%' => (hex(bytes.next()?)? << 4) | hex(bytes.next()?)?,
            byte => byte,
        });
    }
    Some(String::from_utf8(out).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned()))
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok())
}

/// Streams that a client requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestedStreams {
    /// Standard input.
    pub stdin: bool,
    /// Standard output.
    pub stdout: bool,
    /// Standard error; never set together with a terminal.
    pub stderr: bool,
    /// Whether the process gets a terminal.
    pub tty: bool,
}

/// The request selects no stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("you must specify at least 1 of stdin, stdout, stderr")]
pub struct NoStream;

/// Parses the stream flags of exec and attach.
///
/// # Errors
/// If no stream is requested.
pub fn requested_streams(form: &QueryForm) -> Result<RequestedStreams, NoStream> {
    let tty = form.set("tty");
    let flags = RequestedStreams {
        stdin: form.set("input"),
        stdout: form.set("output"),
        stderr: form.set("error") && !tty,
        tty,
    };
    if flags.stdin || flags.stdout || flags.stderr { Ok(flags) } else { Err(NoStream) }
}

/// Reason why the ports of a WebSocket port-forward are invalid; clients depend on these texts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PortsError {
    /// No `port` parameter.
    #[error("query parameter \"port\" is required")]
    Missing,
    /// Empty value, `port=`.
    #[error("query parameter \"port\" cannot be empty")]
    Empty,
    /// Not a 16-bit number.
    #[error("unable to parse {} as a port: strconv.ParseUint: parsing {}: {why}", quote(.whole), quote(.part))]
    NotANumber {
        /// Value of the parameter.
        whole: String,
        /// Invalid element of the list.
        part: String,
        /// Cause, in Go's `strconv` wording.
        why: &'static str,
    },
    /// Port 0.
    #[error("port {} must be > 0", quote(.0))]
    Zero(String),
}

/// Parses the ports of a WebSocket port-forward: a repeatable parameter with comma-separated lists (`80,90`).
///
/// # Errors
/// If there is no port, or one is invalid.
pub fn ports(form: &QueryForm) -> Result<Vec<u16>, PortsError> {
    let mut ports = Vec::new();
    let mut any = false;
    for whole in form.all("port") {
        any = true;
        if whole.is_empty() {
            return Err(PortsError::Empty);
        }
        for part in whole.split(',') {
            ports.push(port(whole, part)?);
        }
    }
    if any { Ok(ports) } else { Err(PortsError::Missing) }
}

fn port(whole: &str, part: &str) -> Result<u16, PortsError> {
    let wrong = |why| PortsError::NotANumber { whole: whole.to_owned(), part: part.to_owned(), why };
    if part.is_empty() || !part.bytes().all(|b| b.is_ascii_digit()) {
        return Err(wrong("invalid syntax"));
    }
    match part.parse::<u16>() {
        Ok(0) => Err(PortsError::Zero(whole.to_owned())),
        Ok(port) => Ok(port),
        Err(_) => Err(wrong("value out of range")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_exactly_one() {
        let all = RequestedStreams { stdin: true, stdout: true, stderr: true, tty: false };
        let rows = [
            ("input=1&output=1&error=1", Ok(all)),
            ("output=1", Ok(RequestedStreams { stdout: true, ..RequestedStreams::default() })),
            ("tty=1&error=1&output=1", Ok(RequestedStreams { stdout: true, tty: true, ..RequestedStreams::default() })),
            ("input=%31", Ok(RequestedStreams { stdin: true, ..RequestedStreams::default() })),
            // AC-04b-S1
            ("", Err(NoStream)),
            ("output=true&input=01&error=", Err(NoStream)),
            ("output=0&output=1", Err(NoStream)),
            ("tty=1&error=1", Err(NoStream)),
            ("output=1;x", Err(NoStream)),
            ("Output=1", Err(NoStream)),
        ];
        for (query, expected) in rows {
            assert_eq!(requested_streams(&QueryForm::parse(query)), expected, "{query}");
        }
        let body = QueryForm::parse("output=0").followed_by(&QueryForm::parse("output=1&input=1"));
        assert_eq!(
            requested_streams(&body),
            Ok(RequestedStreams { stdin: true, ..RequestedStreams::default() }),
            "the body comes first"
        );
        assert_eq!(NoStream.to_string(), "you must specify at least 1 of stdin, stdout, stderr");
    }

    #[test]
    fn commands_keep_their_order_and_their_letters() {
        let form = QueryForm::parse("command=sh&command=-c&command=echo+%22a%26b%22%20%2B&x=%zz&command=%e4&command=");
        let command: Vec<&str> = form.all("command").collect();
        assert_eq!(command, ["sh", "-c", "echo \"a&b\" +", "\u{fffd}", ""]);
        assert_eq!(form.first("x"), None, "a broken escape is as if it were not there");
    }

    #[test]
    fn ports_and_what_is_wrong_with_them() {
        let list = |query: &str| ports(&QueryForm::parse(query)).map_err(|e| e.to_string());
        let bad = |text: &str| Err::<Vec<u16>, _>(text.to_owned());
        let rows = [
            // AC-04b-S9
            ("port=7000,8000&port=9000", Ok(vec![7000, 8000, 9000])),
            ("port=1&port=65535", Ok(vec![1, 65535])),
            ("", bad("query parameter \"port\" is required")),
            ("port=", bad("query parameter \"port\" cannot be empty")),
            ("port=abc", bad("unable to parse \"abc\" as a port: strconv.ParseUint: parsing \"abc\": invalid syntax")),
            ("port=80,", bad("unable to parse \"80,\" as a port: strconv.ParseUint: parsing \"\": invalid syntax")),
            (
                "port=%2B80",
                bad("unable to parse \"+80\" as a port: strconv.ParseUint: parsing \"+80\": invalid syntax"),
            ),
            (
                "port=65536",
                bad("unable to parse \"65536\" as a port: strconv.ParseUint: parsing \"65536\": value out of range"),
            ),
            ("port=0", bad("port \"0\" must be > 0")),
            ("port=80,0", bad("port \"80,0\" must be > 0")),
        ];
        for (query, expected) in rows {
            assert_eq!(list(query), expected, "{query}");
        }
    }
}
