//! Label sets of `/metrics/cadvisor` series. Pure.
//!
//! The labels of a cgroup are formatted once and copied into each of its lines; extra labels are inserted at their
//! sorted position, because consumers read labels sorted. Implements spec 04b §11.

use super::page::push_label_value;
use berth_cadvisor::families::BASE_LABELS;

/// Separator of labels and value.
const LABELS_END: &[u8] = b"} ";

/// Labels of a cgroup beside its ID.
#[derive(Clone, Copy, Default)]
pub(super) struct Names<'a> {
    pub container: &'a str,
    pub image: &'a str,
    pub name: &'a str,
    pub namespace: &'a str,
    pub pod: &'a str,
}

/// `{container="…",id="…",image="…",name="…",namespace="…",pod="…"} `, with the end of each label.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Labels {
    text: Vec<u8>,
    ends: [usize; BASE_LABELS.len()],
}

impl Labels {
    /// Formats the labels.
    pub(super) fn new(id: &str, names: Names<'_>) -> Self {
        let mut text = Vec::with_capacity(128 + id.len());
        let values = [names.container, id, names.image, names.name, names.namespace, names.pod];
        let mut ends = [0; BASE_LABELS.len()];
        for ((name, value), end) in BASE_LABELS.iter().zip(values).zip(&mut ends) {
            text.push(if text.is_empty() { b'{' } else { b',' });
            push_label(&mut text, name, value);
            *end = text.len();
        }
        text.extend_from_slice(LABELS_END);
        Self { text, ends }
    }

    /// Writes the labels with extra ones inserted; both lists are sorted by name.
    pub(super) fn write(&self, out: &mut Vec<u8>, names: &[&str], values: &[&str]) {
        let mut written = 0;
        for (name, value) in names.iter().zip(values) {
            let before = BASE_LABELS.partition_point(|base| base < name);
            let end = before.checked_sub(1).and_then(|last| self.ends.get(last)).copied().unwrap_or(written);
            out.extend_from_slice(self.text.get(written..end).unwrap_or_default());
            out.push(b',');
            push_label(out, name, value);
            written = end;
        }
        out.extend_from_slice(self.text.get(written..).unwrap_or_default());
    }
}

fn push_label(out: &mut Vec<u8>, name: &str, value: &str) {
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"=\"");
    push_label_value(out, value);
    out.push(b'"');
}
