//! Handler of `/statusz`: build, versions, and uptime of the agent (spec 04 §5.7).

use axum::{http::HeaderMap, response::Response};
use jiff::{Timestamp, tz::TimeZone};
use serde_json::{Map, Value, json};

use super::zpages::{self, DELIMITERS, Form};

/// Listed paths: the roots of plain handlers, as in kubelet.
const PATHS: [&str; 5] = ["/configz", "/debug", "/flagz", "/healthz", "/metrics"];

/// Content of the page.
#[derive(Clone, Debug)]
pub struct Statusz {
    /// Start time of the process.
    pub started: Timestamp,
    /// Compiler version; the field is called `goVersion`.
    pub compiler: String,
    /// Reported version, without a leading `v`.
    pub version: String,
    /// Emulated API version, as `major.minor`.
    pub emulated: String,
}

/// Handles a request of any method.
pub fn show(status: &Statusz, now: Timestamp, headers: &HeaderMap) -> Response {
    let up = now.as_second().saturating_sub(status.started.as_second()).max(0);
    match zpages::form(headers, "Statusz") {
        None => zpages::not_acceptable(),
        Some(Form::Text) => {
            let delimiter = DELIMITERS[rand::random_range(0..DELIMITERS.len())];
            zpages::text(text(status, up, delimiter))
        }
        Some(Form::Object { encoding, version }) => zpages::object("Statusz", version, encoding, fields(status, up)),
    }
}

fn text(status: &Statusz, up: i64, d: &str) -> String {
    let started = status.started.to_zoned(TimeZone::UTC).strftime("%a %b %e %H:%M:%S UTC %Y");
    let up = format!("{} hr {:02} min {:02} sec", up / 3600, up / 60 % 60, up % 60);
    let Statusz { compiler, version, emulated, .. } = status;
    let paths = PATHS.join(" ");
    format!(
        "{}\nStarted{d} {started}\nUp{d} {up}\nGo version{d} {compiler}\nBinary version{d} {version}\n\
         Emulation version{d} {emulated}\nPaths{d} {paths}\n",
        zpages::heading("statusz")
    )
}

fn fields(status: &Statusz, up: i64) -> Map<String, Value> {
    let started = status.started.to_zoned(TimeZone::UTC).strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let fields = json!({
        "startTime": started, "uptimeSeconds": up, "goVersion": status.compiler, "binaryVersion": status.version,
        "emulationVersion": status.emulated, "paths": PATHS,
    });
    match fields {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status() -> Statusz {
        Statusz {
            started: "2026-03-04T05:06:07Z".parse().expect("a time"),
            compiler: "rustc".to_owned(),
            version: "1.36.1".to_owned(),
            emulated: "1.36".to_owned(),
        }
    }

    #[test]
    fn people_read_when_it_started_and_what_it_is() {
        let shown = text(&status(), 3_725, ":");
        let lines = "\nStarted: Wed Mar  4 05:06:07 UTC 2026\nUp: 1 hr 02 min 05 sec\nGo version: rustc\nBinary version: 1.36.1\n\
                     Emulation version: 1.36\nPaths: /configz /debug /flagz /healthz /metrics\n";
        assert!(shown.starts_with("\nkubelet statusz\nWarning: ") && shown.ends_with(lines), "{shown}");
    }

    #[test]
    fn machines_read_the_same() {
        let fields = Value::Object(fields(&status(), 5));
        let expected = json!({
            "startTime": "2026-03-04T05:06:07Z", "uptimeSeconds": 5, "goVersion": "rustc", "binaryVersion": "1.36.1",
            "emulationVersion": "1.36", "paths": ["/configz", "/debug", "/flagz", "/healthz", "/metrics"],
        });
        assert_eq!(fields, expected);
        let before: Timestamp = "2026-03-04T05:06:00Z".parse().expect("a time");
        assert_eq!(show(&status(), before, &HeaderMap::new()).status(), 200, "a clock that was set back");
    }
}
