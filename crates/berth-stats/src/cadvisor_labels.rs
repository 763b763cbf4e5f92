//! Label sets of `/metrics/cadvisor` series. Pure.
//!
//! The labels of a cgroup are formatted once and copied into each of its lines; extra labels are inserted at their
//! sorted position, because consumers read labels sorted. Implements spec 04b §11.

use super::page::push_label_value;

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

/// `{container="…",id="…",image="…",name="…",namespace="…",pod="…"} `, with the positions of extra labels.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Labels {
    text: Vec<u8>,
    cuts: [usize; 4],
}

impl Labels {
    /// Formats the labels.
    pub(super) fn new(id: &str, names: Names<'_>) -> Self {
        let mut text = Vec::with_capacity(128 + id.len());
        let mut push = |key: &str, value: &str| {
            text.extend_from_slice(key.as_bytes());
            push_label_value(&mut text, value);
            text.push(b'"');
            text.len()
        };
        let behind_container = push("{container=\"", names.container);
        push(",id=\"", id);
        let behind_image = push(",image=\"", names.image);
        push(",name=\"", names.name);
        let behind_namespace = push(",namespace=\"", names.namespace);
        let behind_pod = push(",pod=\"", names.pod);
        text.extend_from_slice(LABELS_END);
        Self { text, cuts: [behind_container, behind_image, behind_namespace, behind_pod] }
    }

    /// Writes the labels with the extra ones inserted.
    pub(super) fn write(&self, out: &mut Vec<u8>, extra: &[Extra<'_>]) {
        if extra.is_empty() {
            return out.extend_from_slice(&self.text);
        }
        let [container, image, namespace, pod] = self.cuts;
        let parts = [
            (Behind::Container, 0, container),
            (Behind::Image, container, image),
            (Behind::Namespace, image, namespace),
            (Behind::Pod, namespace, pod),
        ];
        for (behind, from, to) in parts {
            out.extend_from_slice(self.part(from, to));
            for (_, key, value) in extra.iter().filter(|(at, ..)| *at == behind) {
                out.push(b',');
                out.extend_from_slice(key.as_bytes());
                out.extend_from_slice(b"=\"");
                push_label_value(out, value);
                out.push(b'"');
            }
        }
        out.extend_from_slice(LABELS_END);
    }

    fn part(&self, from: usize, to: usize) -> &[u8] {
        self.text.get(from..to).unwrap_or_default()
    }
}

/// Position of an extra label: directly after one of the common labels.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Behind {
    /// `container`
    Container,
    /// `image`
    Image,
    /// `namespace`
    Namespace,
    /// `pod`
    Pod,
}

/// An extra label: position, name, and value.
pub type Extra<'a> = (Behind, &'a str, &'a str);
