//! Table responses for `kubectl get` (`as=Table` in Accept).
//!
//!   Accept ─► [`wanted`] ─► [`TableFormat::answer`] for an object or a list, [`TableFormat::event`] for each line of a watch
//!
//! Kinds with many columns have a file each; `default_tables` has all others. Implements spec 10a §3.

mod ages;
mod cells;
mod default_tables;
mod events;
mod nodes;
mod pods;

use bytes::Bytes;
use jiff::Timestamp;
use serde_json::{Value, json};

use super::{resources::Kind, rules::fields::list, store};

/// Column: title in kubectl, type, and whether only `-o wide` shows it.
struct Column {
    name: &'static str,
    /// OpenAPI type: `string` or `integer`.
    kind: &'static str,
    /// OpenAPI format: `name` for the column with the object's name.
    format: &'static str,
    is_wide: bool,
}

impl Column {
    const NAME: Self = Self { name: "Name", kind: "string", format: "name", is_wide: false };
    const AGE: Self = Self::new("Age");

    const fn new(name: &'static str) -> Self {
        Self { name, kind: "string", format: "", is_wide: false }
    }

    const fn wide(name: &'static str) -> Self {
        Self { name, kind: "string", format: "", is_wide: true }
    }

    const fn number(mut self) -> Self {
        self.kind = "integer";
        self
    }

    fn definition(&self) -> Value {
        json!({"name": self.name, "type": self.kind, "format": self.format, "description": "",
               "priority": i32::from(self.is_wide)})
    }
}

/// Columns of a kind, and the function that renders as many cells.
struct Printer {
    columns: &'static [Column],
    cells: fn(&Value, Timestamp) -> Vec<Value>,
}

fn printer(kind: &str) -> Printer {
    match kind {
        "Pod" => pods::PRINTER,
        "Node" => nodes::PRINTER,
        "Event" => events::PRINTER,
        other => default_tables::printer(other),
    }
}

/// Part of the object that a row includes (`includeObject`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Include {
    Nothing,
    Metadata,
    Object,
}

/// Table format that a client requests.
#[derive(Clone, Copy, Debug)]
pub struct TableFormat {
    /// API version of the table itself: `v1` or `v1beta1`.
    version: &'static str,
    include: Include,
}

/// Parses an Accept header; returns the table format if tables precede plain JSON. `include` is the parameter
/// `includeObject`.
pub fn wanted(accept: &str, include: Option<&str>) -> Option<TableFormat> {
    let include = match include {
        Some("None") => Include::Nothing,
        Some("Object") => Include::Object,
        _ => Include::Metadata,
    };
    for media in accept.split(',') {
        let mut parts = media.split(';').map(str::trim);
        if parts.next() != Some("application/json") {
            continue;
        }
        let parameters: Vec<(&str, &str)> = parts.filter_map(|part| part.split_once('=')).collect();
        let find = |name: &str| parameters.iter().find(|(key, _)| *key == name).map(|(_, value)| *value);
        match (find("as"), find("g"), find("v")) {
            (None, ..) => return None,
            (Some("Table"), Some("meta.k8s.io"), Some("v1")) => return Some(TableFormat { version: "v1", include }),
            (Some("Table"), Some("meta.k8s.io"), Some("v1beta1")) => {
                return Some(TableFormat { version: "v1beta1", include });
            }
            _ => {}
        }
    }
    None
}

impl TableFormat {
    /// Renders an object or a list as a table.
    pub fn answer(self, kind: &Kind, body: &Value, now: Timestamp) -> Value {
        let printer = printer(kind.kind);
        let is_list = body["kind"] == format!("{}List", kind.kind);
        let objects = if is_list { list(body, "/items") } else { std::slice::from_ref(body) };
        let rows: Vec<Value> = objects.iter().map(|object| self.row(kind, &printer, object, now)).collect();
        let metadata = if is_list {
            body["metadata"].clone()
        } else {
            json!({"resourceVersion": body["metadata"]["resourceVersion"]})
        };
        let columns: Vec<Value> = printer.columns.iter().map(Column::definition).collect();
        self.table(metadata, json!(columns), rows)
    }

    /// Renders the object of a watch line as a table. Only the first one has column definitions.
    pub fn event(self, kind: &Kind, line: Bytes, is_first: bool, now: Timestamp) -> Bytes {
        let Ok(event) = serde_json::from_slice::<Value>(&line) else { return line };
        let Some(event_type) = event["type"].as_str().filter(|event_type| *event_type != "ERROR") else { return line };
        let mut table = self.answer(kind, &event["object"], now);
        if event_type == "BOOKMARK" {
            table["rows"] = json!([]);
        }
        if !is_first {
            table["columnDefinitions"] = Value::Null;
        }
        store::line(event_type, &table)
    }

    fn row(self, kind: &Kind, printer: &Printer, object: &Value, now: Timestamp) -> Value {
        let mut row = json!({"cells": (printer.cells)(object, now)});
        match self.include {
            Include::Nothing => {}
            Include::Metadata => {
                row["object"] = json!({"kind": "PartialObjectMetadata", "apiVersion": format!("meta.k8s.io/{}", self.version),
                                       "metadata": object["metadata"]});
            }
            Include::Object => {
                row["object"] = object.clone();
                row["object"]["kind"] = json!(kind.kind);
                row["object"]["apiVersion"] = json!(kind.api_version());
            }
        }
        row
    }

    fn table(self, metadata: Value, columns: Value, rows: Vec<Value>) -> Value {
        json!({"kind": "Table", "apiVersion": format!("meta.k8s.io/{}", self.version), "metadata": metadata,
               "columnDefinitions": columns, "rows": rows})
    }
}

#[cfg(test)]
mod tests {
    use super::{super::resources::named, *};

    #[test]
    fn who_asks_for_tables_first_gets_them() {
        let kubectl = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";
        let version = |accept: &str| wanted(accept, None).map(|wanted| wanted.version);
        assert_eq!(version(kubectl), Some("v1"));
        assert_eq!(version("application/json;as=Table;g=meta.k8s.io;v=v1beta1, application/json"), Some("v1beta1"));
        assert_eq!(version("application/json, application/json;as=Table;v=v1;g=meta.k8s.io"), None);
        assert_eq!(version("application/json;as=Table;v=v2;g=meta.k8s.io,application/json"), None);
        assert_eq!(version("*/*"), None);
    }

    #[test]
    fn a_list_becomes_rows_and_a_watch_sends_its_columns_once() {
        let kind = named("configmaps").expect("there");
        let object = json!({"metadata": {"name": "m", "resourceVersion": "7"}, "data": {"a": "b"}});
        let list = json!({"kind": "ConfigMapList", "metadata": {"resourceVersion": "9"}, "items": [object]});
        let tables = TableFormat { version: "v1", include: Include::Metadata };
        let table = tables.answer(kind, &list, Timestamp::UNIX_EPOCH);
        assert_eq!(table["metadata"]["resourceVersion"], "9");
        assert_eq!(table["rows"][0]["cells"], json!(["m", 1, "<unknown>"]));
        assert_eq!(table["rows"][0]["object"]["kind"], "PartialObjectMetadata");
        let line = store::line("ADDED", &object);
        for is_first in [true, false] {
            let event = tables.event(kind, line.clone(), is_first, Timestamp::UNIX_EPOCH);
            let event: Value = serde_json::from_slice(&event).expect("JSON");
            assert_eq!(event["object"]["columnDefinitions"].is_array(), is_first, "{event}");
            assert_eq!(event["object"]["metadata"]["resourceVersion"], "7");
        }
        let error = store::line("ERROR", &json!({"kind": "Status"}));
        assert_eq!(tables.event(kind, error.clone(), true, Timestamp::UNIX_EPOCH), error);
    }

    #[test]
    fn every_kind_has_as_many_cells_as_columns() {
        for kind in super::super::resources::KINDS {
            let printer = printer(kind.kind);
            let cells = (printer.cells)(&json!({"metadata": {"name": "x"}}), Timestamp::UNIX_EPOCH);
            assert_eq!(cells.len(), printer.columns.len(), "{}", kind.kind);
        }
    }
}
