//! Query of `/logs/`: services or file, and limits; parsing, validation, `journalctl` arguments. Pure.
//!
//! Differences from kubelet: `--until` gets the time of `untilTime`, and both times are passed as UTC, so that they
//! mean the same on a machine in another time zone. Implements spec 04 §5.6.

use jiff::{Timestamp, tz::TimeZone};

/// Maximum number of services per query.
const MOST_SERVICES: usize = 4;
/// Maximum length of a service name, in bytes.
const LONGEST_SERVICE: usize = 256;
/// Maximum value of `tailLines`.
const MOST_LINES: i64 = 100_000;

/// Parsed query.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NodeLogQuery {
    /// Service names (systemd units).
    pub services: Vec<String>,
    /// File paths.
    pub files: Vec<String>,
    /// Earliest time.
    pub since: Option<Timestamp>,
    /// Latest time.
    pub until: Option<Timestamp>,
    /// Number of lines from the end.
    pub tail: Option<i64>,
    /// Boot, counted back from the current one (0 or negative).
    pub boot: Option<i64>,
    /// Regular expression that lines must match; empty for all.
    pub pattern: String,
}

impl NodeLogQuery {
    /// Parses a query string; `None` where it contains no known parameter.
    ///
    /// # Errors
    /// The body of a 400 response, without its newline.
    pub fn parse(query: &str) -> Result<Option<Self>, String> {
        let pairs: Vec<(String, String)> = form_urlencoded::parse(query.as_bytes()).into_owned().collect();
        let first = |name: &str| pairs.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value.as_str());
        let mut errors = Errors::default();
        let mut found = Self::default();
        let asked: Vec<&str> = pairs.iter().filter(|(key, _)| key == "query").map(|(_, v)| v.as_str()).collect();
        for value in &asked {
            if value.contains(['/', '\\']) {
                found.files.push((*value).to_owned());
            } else if !value.trim().is_empty() {
                found.services.push((*value).to_owned());
            }
        }
        if !asked.is_empty() && found.files.is_empty() && found.services.is_empty() {
            errors.invalid("query", &list(&asked), "query cannot be empty");
        }
        found.since = time(&mut errors, "sinceTime", first("sinceTime"));
        found.until = time(&mut errors, "untilTime", first("untilTime"));
        found.boot = number(&mut errors, "boot", first("boot"));
        found.tail = number(&mut errors, "tailLines", first("tailLines"));
        first("pattern").clone_into(&mut found.pattern);
        errors.into_result()?;
        Ok((found != Self::default()).then_some(found))
    }

    /// Whether any parameter besides services and files is set.
    pub fn has_options(&self) -> bool {
        *self != Self { services: self.services.clone(), files: self.files.clone(), ..Self::default() }
    }

    /// Validates the query; `stat` is the reason why the file cannot be read, `None` where it can.
    ///
    /// # Errors
    /// The body of a 406 response, without its newline.
    pub fn validate(&self, stat: Option<&str>) -> Result<(), String> {
        let mut errors = Errors::default();
        self.validate_names(&mut errors, stat);
        if let (Some(since), Some(until)) = (self.since, self.until)
            && since > until
        {
            errors.invalid("untilTime", &quoted(&until.to_string()), "must be after `sinceTime`");
        }
        if let Some(boot) = self.boot.filter(|boot| *boot > 0) {
            errors.invalid("boot", &boot.to_string(), "must be less than 1");
        }
        if let Some(tail) = self.tail.filter(|tail| !(0..=MOST_LINES).contains(tail)) {
            errors.invalid("tailLines", &tail.to_string(), &format!("must be between 0 and {MOST_LINES}, inclusive"));
        }
        if let Err(error) = regex_lite::Regex::new(&self.pattern) {
            errors.invalid("pattern", &quoted(&self.pattern), &error.to_string());
        }
        errors.into_result()
    }

    fn validate_names(&self, errors: &mut Errors, stat: Option<&str>) {
        for service in &self.services {
            // kubelet's text names 100, its check uses 256.
            if service.len() > LONGEST_SERVICE {
                errors.invalid("query", &quoted(service), "length must be less than 100");
            } else if !service.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.:@-".contains(&b)) {
                errors.invalid("query", &quoted(service), "input contains unsupported characters");
            }
        }
        let count = self.services.len();
        if count > MOST_SERVICES {
            errors.add(format!("query: Too many: {count}: must have at most {MOST_SERVICES} items"));
        }
        let files = list(&self.files);
        match (self.files.len(), count) {
            (0, 0) => errors.add("query: Required value: cannot be empty with options".to_owned()),
            (0, _) => {}
            (_, 1..) => {
                let both = format!("[{}], [{}]", self.files.join(" "), self.services.join(" "));
                errors.invalid("query", &quoted(&both), "cannot specify a file and service");
            }
            (2.., 0) => errors.invalid("query", &files, "cannot specify more than one file"),
            (1, 0) if self.has_options() => errors.invalid("query", &files, "cannot specify file with options"),
            (1, 0) => stat.into_iter().for_each(|why| errors.invalid("query", &files, why)),
        }
    }

    /// Arguments of `journalctl` for these services.
    pub fn journal_arguments(&self, services: &[&str]) -> Vec<String> {
        let mut arguments: Vec<String> =
            ["--utc", "--no-pager", "--output=short-precise"].into_iter().map(str::to_owned).collect();
        arguments.extend(self.since.map(|since| format!("--since={}", moment(since))));
        arguments.extend(self.until.map(|until| format!("--until={}", moment(until))));
        if let Some(lines) = self.tail {
            arguments.extend(["--pager-end".to_owned(), format!("--lines={lines}")]);
        }
        arguments.extend(services.iter().map(|service| format!("--unit={service}")));
        if !self.pattern.is_empty() {
            // journalctl's default: a pattern with capital letters is case-sensitive.
            let is_sensitive = self.pattern.chars().any(char::is_uppercase);
            arguments.extend([format!("--grep={}", self.pattern), format!("--case-sensitive={is_sensitive}")]);
        }
        if let Some(boot) = self.boot {
            arguments.extend(["--boot".to_owned(), boot.to_string()]);
        }
        arguments
    }
}

/// Log files of a service that the journal does not know, in the order they are tried.
pub fn candidates(service: &str) -> [String; 3] {
    [service.to_owned(), format!("{service}.log"), format!("{service}/{service}.log")]
}

fn moment(time: Timestamp) -> String {
    let t = time.to_zoned(TimeZone::UTC);
    format!("{:04}-{}-{} {:02}:{}:{} UTC", t.year(), t.month(), t.day(), t.hour(), t.minute(), t.second())
}

fn time(errors: &mut Errors, name: &str, text: &str) -> Option<Timestamp> {
    if text.is_empty() {
        return None;
    }
    let parsed = rfc3339(text);
    if parsed.is_none() {
        errors.invalid(name, &quoted(text), "invalid time format");
    }
    parsed
}

/// Parses RFC 3339 strictly: `T`, seconds, and a zone are required.
fn rfc3339(text: &str) -> Option<Timestamp> {
    let bytes = text.as_bytes();
    let at = |i: usize, wanted: u8| bytes.get(i) == Some(&wanted);
    let has_shape = at(4, b'-') && at(7, b'-') && at(10, b'T') && at(13, b':') && at(16, b':');
    let zone = text.get(19..)?.trim_start_matches(|c: char| c == '.' || c.is_ascii_digit());
    let has_zone =
        zone == "Z" || (zone.len() == 6 && zone.starts_with(['+', '-']) && zone.as_bytes().get(3) == Some(&b':'));
    if has_shape && has_zone { text.parse().ok() } else { None }
}

fn number(errors: &mut Errors, name: &str, text: &str) -> Option<i64> {
    if text.is_empty() {
        return None;
    }
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let parsed = text.parse::<i64>().ok();
    if parsed.is_none() {
        let is_number = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        let why = if is_number { "value out of range" } else { "invalid syntax" };
        errors.invalid(name, &quoted(text), &format!("strconv.Atoi: parsing {}: {why}", quoted(text)));
    }
    parsed
}

/// Quotes a text as both JSON and Go do.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn list<T: AsRef<str>>(texts: &[T]) -> String {
    let texts: Vec<String> = texts.iter().map(|text| quoted(text.as_ref())).collect();
    format!("[{}]", texts.join(","))
}

/// Field errors in the format of the Kubernetes API.
#[derive(Default)]
struct Errors(Vec<String>);

impl Errors {
    fn add(&mut self, text: String) {
        if !self.0.contains(&text) {
            self.0.push(text);
        }
    }

    fn invalid(&mut self, field: &str, value: &str, detail: &str) {
        self.add(format!("{field}: Invalid value: {value}: {detail}"));
    }

    fn into_result(self) -> Result<(), String> {
        match self.0.as_slice() {
            [] => Ok(()),
            [one] => Err(one.clone()),
            many => Err(format!("[{}]", many.join(", "))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(query: &str) -> NodeLogQuery {
        NodeLogQuery::parse(query).expect("readable").expect("something")
    }

    #[test]
    fn what_is_not_known_is_no_query() {
        for query in ["", "x=1", "sinceTime=", "pattern=", "limit=3&since=x"] {
            assert_eq!(NodeLogQuery::parse(query), Ok(None), "{query}");
        }
    }

    #[test]
    fn invalid_parameters_are_reported_per_field() {
        for (query, text) in [
            ("query=", "query: Invalid value: [\"\"]: query cannot be empty"),
            ("query=+&query=%20%20", "query: Invalid value: [\" \",\"  \"]: query cannot be empty"),
            ("sinceTime=now", "sinceTime: Invalid value: \"now\": invalid time format"),
            ("untilTime=2026-01-01", "untilTime: Invalid value: \"2026-01-01\": invalid time format"),
            (
                "sinceTime=2026-01-01+00:00:00Z",
                "sinceTime: Invalid value: \"2026-01-01 00:00:00Z\": invalid time format",
            ),
            ("boot=x", "boot: Invalid value: \"x\": strconv.Atoi: parsing \"x\": invalid syntax"),
            (
                "tailLines=99999999999999999999",
                "tailLines: Invalid value: \"99999999999999999999\": strconv.Atoi: parsing \"99999999999999999999\": value out of range",
            ),
            (
                "boot=x&tailLines=y",
                "[boot: Invalid value: \"x\": strconv.Atoi: parsing \"x\": invalid syntax, \
                 tailLines: Invalid value: \"y\": strconv.Atoi: parsing \"y\": invalid syntax]",
            ),
        ] {
            assert_eq!(NodeLogQuery::parse(query), Err(text.to_owned()), "{query}");
        }
    }

    #[test]
    fn unsupported_queries_are_errors() {
        let long = "a".repeat(257);
        for (query, text) in [
            ("tailLines=5", "query: Required value: cannot be empty with options".to_owned()),
            (
                "query=/a.log&query=b",
                "query: Invalid value: \"[/a.log], [b]\": cannot specify a file and service".to_owned(),
            ),
            (
                "query=/a&query=/b",
                "query: Invalid value: [\"/a\",\"/b\"]: cannot specify more than one file".to_owned(),
            ),
            ("query=/a&boot=0", "query: Invalid value: [\"/a\"]: cannot specify file with options".to_owned()),
            ("query=/a", "query: Invalid value: [\"/a\"]: stat /var/log/a: no such file or directory".to_owned()),
            ("query=a&query=b&query=c&query=d&query=e", "query: Too many: 5: must have at most 4 items".to_owned()),
            ("query=a;reboot", "query: Invalid value: \"a;reboot\": input contains unsupported characters".to_owned()),
            ("query=%E2%82%AC", "query: Invalid value: \"€\": input contains unsupported characters".to_owned()),
            (&format!("query={long}"), format!("query: Invalid value: \"{long}\": length must be less than 100")),
            ("query=a&boot=1", "boot: Invalid value: 1: must be less than 1".to_owned()),
            (
                "query=a&tailLines=100001",
                "tailLines: Invalid value: 100001: must be between 0 and 100000, inclusive".to_owned(),
            ),
            (
                "query=a&tailLines=-1",
                "tailLines: Invalid value: -1: must be between 0 and 100000, inclusive".to_owned(),
            ),
            (
                "query=a&sinceTime=2026-01-02T00:00:00Z&untilTime=2026-01-01T00:00:00Z",
                "untilTime: Invalid value: \"2026-01-01T00:00:00Z\": must be after `sinceTime`".to_owned(),
            ),
        ] {
            let verdict = parsed(query).validate(Some("stat /var/log/a: no such file or directory"));
            assert_eq!(verdict, Err(text), "{query}");
        }
        assert!(
            parsed("query=a&pattern=(")
                .validate(None)
                .is_err_and(|text| text.starts_with("pattern: Invalid value: \"(\""))
        );
        for good in ["query=a", "query=/a", "query=kubelet&boot=-1&tailLines=0&pattern=x.*", "query=a@b.c:d_e-f"] {
            assert_eq!(parsed(good).validate(None), Ok(()), "{good}");
        }
    }

    #[test]
    fn the_journal_is_asked_by_arguments() {
        let query = parsed(
            "query=kubelet&sinceTime=2026-03-04T05:06:07%2B02:00&untilTime=2026-03-05T15:16:17Z&tailLines=10\
             &pattern=-x+y&boot=-1",
        );
        let expected = [
            "--utc",
            "--no-pager",
            "--output=short-precise",
            "--since=2026-3-4 03:6:7 UTC",
            "--until=2026-3-5 15:16:17 UTC",
            "--pager-end",
            "--lines=10",
            "--unit=kubelet",
            "--unit=crio",
            "--grep=-x y",
            "--case-sensitive=false",
            "--boot",
            "-1",
        ];
        assert_eq!(query.journal_arguments(&["kubelet", "crio"]), expected);
        assert_eq!(parsed("query=a").journal_arguments(&["a"]).len(), 4);
    }
}
