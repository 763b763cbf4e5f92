//! Table of events. Pure.

use jiff::Timestamp;
use serde_json::{Value, json};

use super::{
    super::rules::fields::{number, text},
    Column, Printer, ages,
    cells::name,
};

pub const PRINTER: Printer = Printer {
    columns: &[
        Column::new("Last Seen"),
        Column::new("Type"),
        Column::new("Reason"),
        Column::new("Object"),
        Column::wide("Subobject"),
        Column::wide("Source"),
        Column::new("Message"),
        Column::wide("First Seen"),
        Column::wide("Count").number(),
        Column { name: "Name", kind: "string", format: "name", is_wide: true },
    ],
    cells,
};

fn cells(event: &Value, now: Timestamp) -> Vec<Value> {
    let is_set = |pointer: &str| !text(event, pointer).is_empty();
    let first = if is_set("/firstTimestamp") { "/firstTimestamp" } else { "/eventTime" };
    let is_series = event["series"].is_object();
    let last = if is_series {
        "/series/lastObservedTime"
    } else if is_set("/lastTimestamp") {
        "/lastTimestamp"
    } else {
        first
    };
    let counted = if is_series { number(event, "/series/count") } else { number(event, "/count") };
    let count = counted.filter(|count| *count > 0 || is_series).unwrap_or(1);
    let kind = text(event, "/involvedObject/kind").to_lowercase();
    let target = match text(event, "/involvedObject/name") {
        "" => kind,
        name => format!("{kind}/{name}"),
    };
    vec![
        json!(ages::since(event, last, now)),
        json!(text(event, "/type")),
        json!(text(event, "/reason")),
        json!(target),
        json!(text(event, "/involvedObject/fieldPath")),
        json!(source(event)),
        json!(text(event, "/message").trim()),
        json!(ages::since(event, first, now)),
        json!(count),
        name(event),
    ]
}

fn source(event: &Value) -> String {
    let (component, host) = match text(event, "/source/component") {
        "" => (text(event, "/reportingComponent"), text(event, "/reportingInstance")),
        component => (component, text(event, "/source/host")),
    };
    if host.is_empty() { component.to_owned() } else { format!("{component}, {host}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_as_old_as_its_last_time() {
        let now = "2026-01-01T00:10:00Z".parse().expect("a time");
        let event = json!({"metadata": {"name": "e"}, "firstTimestamp": "2026-01-01T00:00:00Z", "lastTimestamp": "2026-01-01T00:09:00Z",
            "count": 3, "type": "Warning", "reason": "BackOff", "message": " again\n", "source": {"component": "kubelet", "host": "n"},
            "involvedObject": {"kind": "Pod", "name": "p", "fieldPath": "spec.containers{c}"}});
        let expected =
            json!(["60s", "Warning", "BackOff", "pod/p", "spec.containers{c}", "kubelet, n", "again", "10m", 3, "e"]);
        assert_eq!(json!(cells(&event, now)), expected);
        let newer = json!({"eventTime": "2026-01-01T00:05:00.000000Z", "reportingComponent": "s",
            "series": {"count": 2, "lastObservedTime": "2026-01-01T00:06:00.000000Z"}});
        let cells = cells(&newer, now);
        assert_eq!((&cells[0], &cells[5], &cells[7], &cells[8]), (&json!("4m"), &json!("s"), &json!("5m"), &json!(2)));
    }
}
