//! The labels of a group's series. Pure.
//!
//! They are written once and copied into each of the group's lines; extra labels are put where they belong by name, because
//! consumers read labels sorted. Behaviour: spec 04b §11.

use super::page::push_label_value;

/// What stands between labels and a value.
const LABELS_END: &[u8] = b"} ";

/// The labels of a group beside its id.
#[derive(Clone, Copy, Default)]
pub(super) struct Names<'a> {
    pub container: &'a str,
    pub image: &'a str,
    pub name: &'a str,
    pub namespace: &'a str,
    pub pod: &'a str,
}

/// `{container="…",id="…",image="…",name="…",namespace="…",pod="…"} `, and where others can be put in.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Labels {
    text: Vec<u8>,
    cuts: [usize; 4],
}

impl Labels {
    /// Writes them.
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

    /// Writes them once more, with others among them.
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

/// Where an extra label stands among those that all have.
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

/// An extra label.
pub type Extra<'a> = (Behind, &'a str, &'a str);
