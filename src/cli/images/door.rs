//! To whom an order goes: the runtime that runs, or its store under the lock that a runtime would hold.

use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    time::Duration,
};

use anyhow::{Result, bail};
use tokio::sync::mpsc;

use berth_runtime::{
    config::EmbeddedConfig,
    errors::ErrorKind,
    images::{
        ImageStore,
        counter::{self, AskError},
        orders::{self, Image, Order, Told},
        progress::Shown,
    },
    parts,
    store::Lock,
};

/// A runtime that starts has the lock before it takes orders, one that ends lets go of it last: tries, and how far apart.
const TRIES: u32 = 20;
const BETWEEN: Duration = Duration::from_millis(250);
/// Words that wait to be shown.
const WAITING: usize = 64;

/// What came of an order.
pub(super) struct Answer {
    told: Vec<Told>,
    end: Option<Told>,
}

impl Answer {
    /// Whether there is no such image.
    pub(super) fn is_unknown(&self) -> bool {
        matches!(self.end, Some(Told::Failed(true, _)))
    }

    /// Everything that was told, if it was done.
    pub(super) fn told(self) -> Result<Vec<Told>> {
        match self.end {
            Some(Told::Failed(_, text)) => bail!(text),
            _ => Ok(self.told),
        }
    }

    /// Whether it was done.
    pub(super) fn done(self) -> Result<()> {
        self.told().map(drop)
    }

    /// The images that were told, if it was done.
    pub(super) fn images(self) -> Result<Vec<Image>> {
        let image = |told| match told {
            Told::Image(image) => Some(*image),
            _ => None,
        };
        Ok(self.told()?.into_iter().filter_map(image).collect())
    }

    fn hear(&mut self, word: Told, show: &mut impl FnMut(Vec<Shown>)) {
        match word {
            Told::Progress(shown) => show(shown),
            end @ (Told::Done | Told::Failed(..)) => self.end = Some(end),
            other => self.told.push(other),
        }
    }
}

/// Gives an order; `show` is told how far it is.
pub(super) async fn order(
    config: &EmbeddedConfig,
    order: Order,
    file: Option<File>,
    mut show: impl FnMut(Vec<Shown>),
) -> Result<Answer> {
    let folder = counter::folder(&config.state);
    let mut answer = Answer { told: Vec::new(), end: None };
    let mut refusal = None;
    for _ in 0..TRIES {
        let asked =
            counter::ask(&folder, &order, file.as_ref().map(File::as_fd), |word| answer.hear(word, &mut show)).await;
        match asked {
            Ok(()) => return Ok(answer),
            Err(AskError::Nobody { .. }) => {}
            Err(AskError::Refused { source, .. }) if source.kind() == std::io::ErrorKind::PermissionDenied => {
                bail!("only root may ask the runtime about its images");
            }
            Err(error) => return Err(error.into()),
        }
        match parts::images_alone(config).await {
            Ok((lock, store)) => return alone(lock, &store, order, file.map(OwnedFd::from), answer, show).await,
            Err(error) if error.kind == ErrorKind::Unavailable => refusal = Some(error),
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(BETWEEN).await;
    }
    match refusal {
        Some(error) => bail!("{error}, and takes no orders"),
        None => bail!("no runtime takes orders"),
    }
}

async fn alone(
    lock: Lock,
    store: &ImageStore,
    order: Order,
    file: Option<OwnedFd>,
    mut answer: Answer,
    mut show: impl FnMut(Vec<Shown>),
) -> Result<Answer> {
    let (tell, mut told) = mpsc::channel(WAITING);
    let work = async move {
        let outcome = orders::carry_out(store, order, file, &tell).await;
        // Heard below, until this ends.
        let _ = tell.send(orders::last(outcome)).await;
    };
    let heard = async {
        while let Some(word) = told.recv().await {
            answer.hear(word, &mut show);
        }
        answer
    };
    let ((), answer) = futures::join!(work, heard);
    store.collect().await?;
    drop(lock);
    Ok(answer)
}
