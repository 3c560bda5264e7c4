/*
 * The character model of charlm: the last `context` characters, each as a vector
 * of `embed` numbers, side by side; two hidden layers with tanh; softmax over the
 * alphabet. Forward and backward by hand, one layer at a time, so that a caller
 * may fetch each layer's parameters just before and give them back just after.
 *
 * Parameters of a layer are one flat fp32 array: the embedding [vocab][embed]; a
 * dense layer its weight [in][out], then its bias [out].
 *
 * What a sample gives does not depend on the samples beside it, and gradients are
 * summed in double in sample order and rounded once: the number of ranks a batch
 * is cut into changes a gradient by less than two roundings.
 * Pure arithmetic, any thread, one model per thread.
 */
#ifndef CHARLM_MODEL_H
#define CHARLM_MODEL_H

#include <stddef.h>
#include <stdint.h>

enum layer { LAYER_EMBED, LAYER_HIDDEN1, LAYER_HIDDEN2, LAYER_OUT, LAYER_N };

struct model_shape {
	unsigned vocab;
	unsigned context;
	unsigned embed;
	unsigned hidden;
};

/* Rows and columns of a layer's matrix. */
struct layer_shape {
	unsigned in;
	unsigned out;
};

struct model; /* activations and their gradients, for a number of samples */

struct layer_shape layer_shape(const struct model_shape *s, enum layer layer);

/* Elements of a layer's flat parameters. */
size_t layer_elements(const struct model_shape *s, enum layer layer);

/* embed, hidden1, hidden2, out. Static. */
const char *layer_name(enum layer layer);

/* Room for @samples samples. @ret: model_free. Return: 0 or -ENOMEM. */
int model_new(const struct model_shape *s, unsigned samples, struct model **ret);

/* NULL is allowed. Return: NULL. */
struct model *model_free(struct model *m);

/* Where to put sample @i's context symbols and its target. */
unsigned char *model_context(struct model *m, unsigned i);
unsigned char *model_target(struct model *m, unsigned i);

/* One layer forward, in the order of the layers. @params: borrowed. */
void model_forward(struct model *m, enum layer layer, const float *params);

/* After LAYER_OUT: -log of the probability given to each target, into
 * @ret_losses, and the gradient where the backward starts. */
void model_loss(struct model *m, float *ret_losses);

/* One layer backward, in reverse order. @params: borrowed, as in the forward.
 * @ret_gradient: all of it is written: @scale times the sum over the samples. */
void model_backward(struct model *m, enum layer layer, const float *params, double scale,
		    float *ret_gradient);

#endif
